"""In: what an analysis found. Out: what a person or a program reads.

Read `console` (tables) and `page` (an HTML file of the templates in `pages`, with `charts`) first; then what they show:
`report` (a run), `diagnosis`, `replay`, `bandwidth`, `chakra`. `timeline` writes for Perfetto.
"""
