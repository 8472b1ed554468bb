#!/bin/bash
# The agent's orders, and others that it has not seen.
passed=1
printf 'Ada 17\nBo 7\nCy 1\n' | cmp - <(bash totals.sh) || passed=0
mv orders.csv kept.csv
printf 'name,amount\nZoe,2\nDee,4\nZoe,3\n' > orders.csv
printf 'Dee 4\nZoe 5\n' | cmp - <(bash totals.sh) || passed=0
mv kept.csv orders.csv
echo $passed > /logs/verifier/reward.txt
