"""Collections of images as they lie in files: opened, written, converted, verified, described."""
