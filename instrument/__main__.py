"""`python -m crossrank.instrument`: see `crossrank.instrument.runner`.

The script replaces this module as `__main__`, so this module has no other code.
"""

from crossrank.instrument.runner import main

main()
