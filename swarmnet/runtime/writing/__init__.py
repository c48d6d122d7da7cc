"""Texts in words: tokenizer, sampling and chat template around a `RemoteText`."""
