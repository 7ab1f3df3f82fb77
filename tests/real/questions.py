"""Thirty questions, and a word that an answer to each must have: small models know many of them, and no model all."""

from __future__ import annotations

QUESTIONS = {
    "What is the capital of France?": "Paris", "What is the capital of Italy?": "Rome",
    "What is the capital of Japan?": "Tokyo", "What is the capital of Germany?": "Berlin",
    "What is the capital of Spain?": "Madrid", "What is the capital of Egypt?": "Cairo",
    "What is the capital of Russia?": "Moscow", "What is the capital of England?": "London",
    "What is the capital of China?": "Beijing", "What is the largest ocean on Earth?": "Pacific",
    "Which planet is known as the Red Planet?": "Mars", "What is the largest planet of the solar system?": "Jupiter",
    "Which planet is closest to the sun?": "Mercury", "Who wrote Romeo and Juliet?": "Shakespeare",
    "Who developed the theory of relativity?": "Einstein", "Who painted the Mona Lisa?": "Leonardo",
    "What is the chemical formula of water?": "H2O", "What gas do plants absorb from the air?": "carbon dioxide",
    "How many days are in a week?": "seven|7", "How many months are in a year?": "twelve|12",
    "What is 2 plus 2?": "4|four", "What is 5 plus 3?": "8|eight",
    "What color is the sky on a clear day?": "blue", "What is the opposite of hot?": "cold",
    "What is the freezing point of water in Celsius?": "0|zero", "Which animal is known as man's best friend?": "dog",
    "What language is spoken in Brazil?": "Portuguese", "On which continent is Kenya?": "Africa",
    "What is the tallest mountain on Earth?": "Everest", "Which organ pumps blood through the body?": "heart",
}  # fmt: skip
