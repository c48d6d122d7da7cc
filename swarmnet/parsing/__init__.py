"""Files of others are parsed in a process of their own.

A tokenizer and a chat template come from whoever started a run, or from a hub. What reads them are
large libraries and programs in a language of their own: a file may make them end the process that
they run in, take gigabytes, or never come back. So `process` starts a child that does it (`child`),
with limits of memory and time; what it breaks is that child, and a person gets one line.
"""
