"""Show the results of analyses: on the terminal, on HTML pages, and in files.

Start with `console` (tables) and `page` (HTML from the templates in `pages`, with `charts`). They show `report` (a
run), `diagnosis`, `replay`, `bandwidth` and `chakra`. `timeline` writes for Perfetto.
"""
