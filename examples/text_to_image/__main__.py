from examples._cli import start
from examples.text_to_image.main import main

start(main)
