"""Runs a command whose only network is a Unix socket, at a port of 127.0.0.1: `relay.py SOCKET PORT WORDS...`, sent as source."""

import asyncio
import sys


async def passed_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while data := await reader.read(1 << 16):
            writer.write(data)
            await writer.drain()
        writer.write_eof()
    except OSError:  # one side is gone: so is the other for it
        writer.transport.abort()


async def main(path: str, port: str, *words: str) -> int:
    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            answers, asks = await asyncio.open_unix_connection(path)
        except OSError:  # as where nobody listens
            writer.transport.abort()
            return
        await asyncio.gather(passed_on(reader, asks), passed_on(answers, writer))
        asks.close()
        writer.close()

    await asyncio.start_server(connected, "127.0.0.1", int(port), backlog=256)
    try:
        process = await asyncio.create_subprocess_exec(*words)
    except OSError as error:
        sys.stderr.write(f"{words[0]}: {error.strerror}\n")
        return 127 if isinstance(error, FileNotFoundError) else 126
    code = await process.wait()
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(asyncio.run(main(*sys.argv[1:])))
