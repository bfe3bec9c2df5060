"""Configurations, schemes and number formats."""
