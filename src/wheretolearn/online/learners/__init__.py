"""Online learners, one family per file."""
