"""Reports: figures and self-contained HTML pages."""
