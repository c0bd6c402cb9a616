from examples._cli import start
from examples.private_training.main import main

start(main)
