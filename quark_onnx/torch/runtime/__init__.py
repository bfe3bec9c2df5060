"""Processes, threads and memory."""
