"""Running the paper's tables and figures: what is recorded, what is missing, and how it compares."""
