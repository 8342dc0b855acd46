"""Runs the script once more, for the classes and functions that it defines."""

from ortrain.compat.again import MAIN
from ortrain.compat.running import run_again

if __name__ == "__mp_main__":
    run_again(MAIN, globals())
