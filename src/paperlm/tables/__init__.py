"""Tables from records: build, compare with the published numbers, judge claims. No torch here."""
