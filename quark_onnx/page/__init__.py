"""Results as blocks: lines of a terminal, and self-contained pages, light and dark."""
