from examples._cli import start
from examples.reward_model.main import main

start(main)
