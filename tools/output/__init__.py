"""In: what an analysis found. Out: what a person or a program reads.

Read `console` (tables) and `page` (sections and blocks of one HTML file, with `charts` and the template `page.html`)
first; then what they show: `report` (a run), `diagnosis`, `replay`, `bandwidth`. `timeline` writes for Perfetto.
"""
