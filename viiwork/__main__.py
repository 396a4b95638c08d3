"""`python -m viiwork`."""

from viiwork.cli.main import main

raise SystemExit(main())
