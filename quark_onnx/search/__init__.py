"""Search configurations: space, trials, journal and front."""
