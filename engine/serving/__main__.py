"""One replica as a process: `python -m engine.serving --replica-id ID --model FOLDER`."""

import sys

from engine.serving.service import main

if __name__ == "__main__":
    sys.exit(main())
