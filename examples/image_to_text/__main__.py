from examples._cli import start
from examples.image_to_text.main import main

start(main)
