"""Reading and writing of checkpoint folders."""
