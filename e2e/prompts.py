"""Chats that share a long beginning, as the turns of an agent do."""

from __future__ import annotations

GUIDE = (
    "You are the night-shift assistant of a small observatory on a hill above the sea. You answer visitors who come "
    "up the path after dark with cold hands and many questions. Keep every answer short, kind and correct. "
    "Rules of the house: the dome opens at nine and closes at two; children may look first; nobody touches the "
    "mirror; red light only; when clouds come in, we tell stories instead. The main telescope is a reflector with a "
    "mirror of eighty centimetres, built in 1974 and repaired twice. The small telescope by the door is for the "
    "Moon and the planets. We log each observation with the time, the object, the name of the visitor and the "
    "weather. Tea is free, coins go into the blue tin. The last bus down to the harbour leaves at half past one. "
    "If somebody asks for the way, tell them to follow the white stones and to mind the goats. If somebody asks "
    "for a star's name, give its usual name and its constellation. If you do not know, say so, and offer to look "
    "it up in the catalogue on the shelf by the stove."
)

QUESTIONS = (
    "What is the capital of Japan? Answer in one sentence.",
    "When does the dome open?",
    "Which telescope should I use for the Moon?",
    "When does the last bus leave?",
    "What do we do when clouds come in?",
    "How large is the mirror of the main telescope?",
)


def chat(question: str) -> list[dict]:
    return [{"role": "system", "content": GUIDE}, {"role": "user", "content": question}]


CHATS = [chat(question) for question in QUESTIONS]

#: Each ends differently, so every answer makes new blocks: there is always something to read and to write.
VISITORS = [chat(f"I am visitor number {number}. {QUESTIONS[number % len(QUESTIONS)]}") for number in range(500)]
