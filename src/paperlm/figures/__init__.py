"""Figures, each with the CSV of its numbers. Importing this loads no plotting library."""

KINDS = {
    "largest_batch": "paperlm.figures.largest_batch:draw",
    "access_patterns": "paperlm.figures.access_patterns:draw",
    "measured_bars": "paperlm.figures.measured_bars:draw",
    "rank_probability": "paperlm.figures.rank_probability:draw",
    "training_loss": "paperlm.figures.pretraining:training_loss",
    "validation_perplexity": "paperlm.figures.pretraining:validation_perplexity",
}
"""Kind of a figure in a paper file -> the function draw(project, name, records) -> Drawing."""
