"""Text for the examples, so that they run without a download: the manual inside Python."""

from pydoc_data.topics import topics


def paragraphs(num: int) -> list[str]:
    """Return paragraphs of prose of at least ten words, one line each; put yours in their place."""
    found = (" ".join(text.split()) for topic in topics.values() for text in topic.split("\n\n"))
    return [text for text in found if len(text.split()) >= 10][:num]
