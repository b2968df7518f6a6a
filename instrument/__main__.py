"""`python -m crossrank.instrument`: see `crossrank.instrument.runner`.

The script takes over this very module as its `__main__`, so nothing else lives here.
"""

from crossrank.instrument.runner import main

main()
