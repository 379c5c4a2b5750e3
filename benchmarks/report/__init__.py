"""Reports on results: tables, figures, pages, and comparisons with runs that are stored."""
