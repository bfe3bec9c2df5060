"""Prepare the float graph and plan what every tensor becomes."""
