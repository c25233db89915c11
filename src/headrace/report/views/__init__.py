"""Reports as text, tables, pictures, and one page."""
