"""needs.py: what scripts do about packages that are not there. With `with needs("PyTorch"): import
torch`, the --help of a script works without them, and anything else ends in one line that says what to install.
"""
import contextlib
import os
import sys


@contextlib.contextmanager
def needs(packages):
    """The imports in its block are those of `packages`, in words."""
    try:
        yield
    except ImportError as error:
        main = sys.modules["__main__"]
        if not {"-h", "--help"} & set(sys.argv[1:]):
            sys.exit(f"{os.path.basename(main.__file__)}: {error}: install {packages}")
        print(main.__doc__)
        sys.exit()


if __name__ == "__main__":
    print(__doc__)
