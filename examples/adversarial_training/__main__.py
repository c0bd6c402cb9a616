from examples._cli import start
from examples.adversarial_training.main import main

start(main)
