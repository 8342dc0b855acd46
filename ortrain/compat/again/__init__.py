"""The main module of a script, in a process that the script has started by ``multiprocessing``.

Such a process runs this package under the name ``__mp_main__``.
"""

import sys

# Of the process that started this one; while the package runs, it is the package's own file.
MAIN = sys.argv[0]
