from examples._cli import start
from examples.text_to_text.main import main

start(main)
