"""Stored collections of images: opened, written, converted, verified, described."""
