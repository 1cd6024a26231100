"""Text in, memory-mapped token shards out. The registry names every dataset and tokenizer with its checksum."""
