"""Measurements of speed, as rows of paper_tables/records/bench/<op>.jsonl."""
