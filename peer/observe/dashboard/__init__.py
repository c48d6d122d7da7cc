"""The web page: a run as a researcher sees it, live or replayed.

`hub` keeps what the page shows and tells each visitor what changed; `app` is what a browser may
ask for; `server` serves it on the event loop of whoever watches the run; `replay` makes the same
messages from a metrics file. The page itself is in `static/`: no build step, nothing from outside.
"""
