"""AMD's custom operators."""
