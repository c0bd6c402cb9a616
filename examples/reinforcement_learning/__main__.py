from examples._cli import start
from examples.reinforcement_learning.main import main

start(main)
