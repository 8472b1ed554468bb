"""`python -m agent_train.report RUN`: write a run's report again."""

import sys

from agent_train.report.page import main

sys.exit(main())
