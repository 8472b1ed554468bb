"""An exported file, or a report, as a browser reads it."""

import json
from html.parser import HTMLParser


class Page(HTMLParser):
    """The elements of a page as a browser's tokenizer finds them: where a script ends above all."""

    def __init__(self, text):
        super().__init__(convert_charrefs=True)
        self.elements, self.texts, self._open = [], [], None
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        self._open = len(self.elements) - 1 if tag in ("script", "style") else None

    def handle_endtag(self, tag):
        self._open = None

    def handle_data(self, text):
        if self._open is not None:
            self.texts.append((*self.elements[self._open], text))

    @property
    def data(self):
        (found,) = [text for tag, attrs, text in self.texts if attrs.get("id") == "agentgym-data"]
        return json.loads(found)
