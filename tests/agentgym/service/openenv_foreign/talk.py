"""OpenEnv's generic client, which says what it is told and prints what it got: `talk.py JSON`.

The JSON is a list of talks, one after another: {"url", "headers"?, "timeout"?, "calls": [["reset", {...}], ["step", {...}], ...]}.
What is printed last is a list of lists: results, and errors as {"raised": type, "message": text}.
"""

import asyncio
import json
import sys
from pathlib import Path

from openenv import GenericEnvClient


async def talk(url, calls, headers=None, timeout=60.0):
    client = GenericEnvClient(base_url=url, headers=headers, message_timeout_s=timeout)
    found = []
    for name, given in calls:
        try:
            if name == "reset":
                result = (await client.reset(**given)).observation
            elif name == "step":
                result = (await client.step(given)).observation
            elif name == "await file":
                while not Path(given).read_text():
                    await asyncio.sleep(0.02)
                result = None
            elif name == "say":  # to the test
                sys.stdout.write(f"{given}\n")
                sys.stdout.flush()
                result = None
            else:
                result = await getattr(client, name)()
                result = result if isinstance(result, dict) else None
        except Exception as error:  # what a user would see
            result = {"raised": type(error).__name__, "message": str(error)}
        found.append(result)
    await client.close()
    return found


async def talks(all_of_them):
    return [await talk(**one) for one in all_of_them]


if __name__ == "__main__":
    sys.stdout.write("\n" + json.dumps(asyncio.run(talks(json.loads(sys.argv[1])))) + "\n")
