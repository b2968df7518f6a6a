"""One page about a run: what it communicates, how fast, who waits for whom, what is wrong.

`gather` reads everything, rank by rank; `traffic` and `figures` turn it into small tables, whatever the
number of ranks; `page` makes the HTML file.
"""
