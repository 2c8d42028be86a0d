"""HTTP only: JSON in, `AsyncEngine` in the middle, JSON or server-sent events out. Never arrays.

Read in this order: `app` (routes), `completions` and `chat` (one endpoint each), `generation` (what
both share), `streaming`, and `errors` (the one place that turns an exception into a status).
"""
