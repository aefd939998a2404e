"""`python -m tunesmith`: the command line where the script is not on the PATH."""

from tunesmith.cli.main import main

main()
