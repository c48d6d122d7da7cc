"""Codecs: fp32 numbers to fewer bytes and back. `registry.codec_of` gives one by its name.

Each codec is a pure function pair: no state, and no random numbers. So the same numbers give the
same bytes, and the same bytes the same numbers, on every machine and device.
"""
