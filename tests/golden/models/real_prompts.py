"""The prompts of the real model's goldens: raw text, or messages for its chat template."""

LONG_TEXT = (
    "The lighthouse at the end of the harbour had not been lit for thirty years when the council "
    "decided to sell it. Most people in the village thought that nobody would want to buy a tower "
    "with no heating, a leaking roof and 142 steps, but on the first day of the sale a woman in a "
    "yellow coat walked into the office, put a key on the table and said that she had come to pay "
    "for what was already hers. Her grandfather, she explained, had been the last keeper. He had "
    "written down every ship that passed, every storm, and every bird that flew against the glass, "
    "in a set of blue notebooks that began in 1921 and ended on the night when the lamp was turned "
    "off. She had read all of them, and she had found that the tower was never the property of the "
    "village at all: it had been lent to the harbour by her family, for as long as the light was "
    "needed, at the price of one silver coin a year. The coins had never been paid. The mayor, who "
    "was a careful man, asked to see the notebooks. He read them for three days and three nights, "
    "while the fishermen waited outside and told each other what they would do with the money. On "
    "the fourth morning he came out into the rain, looked up at the dark window at the top of the "
    "tower, and said"
)

PROMPTS = {
    "raw": {"text": "The three primary colors are"},
    "code": {"text": 'def is_prime(n):\n    """Return True if n is a prime number."""\n'},
    "long": {"text": LONG_TEXT},
    "chat": {"messages": [{"role": "user", "content": "What is the capital of France?"}]},
    "turns": {
        "messages": [
            {"role": "system", "content": "You are a cook who answers in short sentences."},
            {"role": "user", "content": "How long do I boil an egg?"},
            {"role": "assistant", "content": "Boil it for 7 minutes."},
            {"role": "user", "content": "And how do I make a good soup with carrots?"},
        ]
    },
}
