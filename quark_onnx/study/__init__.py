"""The one search loop: candidates, their records, the journal and the front."""
