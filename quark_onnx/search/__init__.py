"""Search configurations: space, runs, score and result."""
