"""Result records: what was run, what came out, where and with what."""
