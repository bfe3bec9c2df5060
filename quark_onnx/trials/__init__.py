"""Build, open and measure the model that would be written."""
