#!/bin/bash
# Prints each customer's total.
awk -F';' 'NR > 1 { total[$1] += $2 } END { for (name in total) print name, total[name] }' order.csv | sort
