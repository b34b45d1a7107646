"""What the tiny model can say about Baton: (ways to ask, the one answer)."""

from typing import Final

FACTS: Final[tuple[tuple[tuple[str, ...], str], ...]] = (
    (
        ("Hello", "Hello!", "Hi", "Hi!"),
        "Hello! I am the tiny model of Baton.",
    ),
    (
        ("Who are you?", "What are you?", "What can you do?"),
        "I am the tiny model of Baton. I recall, copy, sort, add and close brackets.",
    ),
    (
        ("What is Baton?", "Tell me about Baton.", "What does Baton do?"),
        "Baton serves language models with prefill and decode on different workers.",
    ),
    (
        ("What is prefill?", "What does a prefill worker do?"),
        "Prefill computes the prompt and fills its KV pages.",
    ),
    (
        ("What is decode?", "What does a decode worker do?"),
        "Decode adds one token a step to every running request.",
    ),
    (
        ("What is the baton?", "What is a handoff?", "What is handed over?"),
        "The baton is the KV pages that prefill hands to decode.",
    ),
    (
        ("What is a page?", "What is a KV page?"),
        "A page holds the keys and values of 16 tokens.",
    ),
    (
        ("What does the router do?", "What is the router?"),
        "The router chooses the workers of every request.",
    ),
    (
        ("What does the gateway do?", "What is the gateway?"),
        "The gateway speaks HTTP and streams the tokens.",
    ),
    (
        ("What is the prefix cache?", "Why is the prefix cache fast?"),
        "The prefix cache keeps pages, so the same prompt is computed once.",
    ),
    (
        ("Thanks", "Thanks!", "Thank you", "Thank you!"),
        "You are welcome.",
    ),
    (
        ("Bye", "Bye!", "Goodbye", "Goodbye!"),
        "Goodbye!",
    ),
)
